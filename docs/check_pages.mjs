// Checks built pages in a real browser: axe finds no serious violation, in both themes; nothing overflows sideways at 1280
// and 390 px, at 1280 no line of code and no table either; a reader who searches from the landing page gets to what they
// ask.
//
// node docs/check_pages.mjs FOLDER [PAGE...]   all pages if none is named
//
// Needs playwright-core and axe-core; CHROMIUM is the browser's path.
import { createRequire } from "node:module";
import { readFileSync, readdirSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(resolve("node_modules/"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const [folder, ...named] = process.argv.slice(2);
// Sources, assets and indexes are Sphinx's own.
const written = (path) => /\.html$/.test(path) && !/^(_|genindex|py-modindex|search)/.test(path);
const all = readdirSync(folder, { recursive: true }).filter(written).map((path) => path.replace(/\.html$/, ""));
const pages = named.length ? named : all.sort();
const WIDTHS = [1280, 390];
const SERIOUS = new Set(["serious", "critical"]);

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
});
let faults = 0;
const fault = (text) => { faults += 1; console.log(text); };
for (const page of pages) {
  const url = pathToFileURL(resolve(folder, `${page}.html`)).href;
  for (const width of WIDTHS) {
    for (const scheme of ["light", "dark"]) {
      const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
      const tab = await context.newPage();
      await tab.goto(url);
      const where = `${page} at ${width} px, ${scheme}`;
      const wide = await tab.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      if (wide > 0) fault(`${where}: ${wide} px wider than the window`);
      const cut = await tab.evaluate(() => [...document.querySelectorAll("article :is(pre, .table-wrapper)")]
        .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent.trim().slice(0, 60)));
      if (width === 1280 && cut.length) fault(`${where}: ${cut.length} blocks are cut, first ${cut[0]}`);
      await tab.evaluate(axe);
      const { violations } = await tab.evaluate(() => window.axe.run());
      for (const { id, impact, nodes } of violations.filter(({ impact }) => SERIOUS.has(impact))) {
        fault(`${where}: ${id} (${impact}), ${nodes.length} times, first ${nodes[0].html.slice(0, 160)}`);
      }
      await context.close();
    }
  }
}
// From the landing page to an answer, by the search and by links, as a reader goes.
const WALKS = [
  { words: "MaxText Mixtral", page: "maxtext.html", says: "python examples/maxtext_mixtral.py" },
  { words: "Qwen3 MoE layer", page: "recipes.html", says: "load_layer" },
  { words: "fp8 slower", page: "limits.html", then: "performance.html#what-does-fp8-bring", says: "fp8_for_your_shape.py" },
];
for (const { words, page, then, says } of WALKS) {
  const tab = await browser.newPage({ viewport: { width: 1280, height: 900 } });
  try {
    await tab.goto(pathToFileURL(resolve(folder, "index.html")).href);
    await tab.fill("input[name=q]", words);
    await tab.press("input[name=q]", "Enter");
    await tab.click(`#search-results a[href*="${page}"] >> nth=0`, { timeout: 10000 });
    if (then) await tab.click(`article a[href*="${then}"] >> nth=0`, { timeout: 10000 });
    await tab.waitForSelector(`article:has-text("${says}")`, { timeout: 10000 });
    console.log(`walk "${words}": ${tab.url().split("/").pop()}`);
  } catch (error) {
    fault(`walk "${words}": ${error.message.split("\n")[0]}`);
  }
  await tab.close();
}
await browser.close();
console.log(`${pages.length} pages in ${2 * WIDTHS.length} views: ${faults} faults`);
process.exit(faults ? 1 : 0);
