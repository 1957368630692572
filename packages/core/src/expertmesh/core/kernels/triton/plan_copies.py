"""The plan of copies of experts on NVIDIA GPUs: one warp for each plan that is tried, all steps in its registers.

The law is that of ep's `copy_plan.py`. What a step looks for is one maximum: of 64-bit keys that hold the rule, the
value that it goes by, the rank and its free slots. What is wanted low is in a key with its bits turned. Dimension key
as there.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher

LOW = tl.constexpr(16)  # bits of a key below the value: 10 of the rank, 6 of its free slots
FREE = tl.constexpr(6)
RULE = tl.constexpr(48)  # the bits above are the rule's
LAST = tl.constexpr(1023)
MOST = tl.constexpr(2**31 - 1)
ENOUGH = tl.constexpr(2**31)  # above all counts: of an expert that has the excess


@triton.jit
def _plan_kernel(
    counts, expert, rows, load_out,
    R: tl.constexpr, E: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, LEAST: tl.constexpr,
    R_POW2: tl.constexpr, E_POW2: tl.constexpr, S_POW2: tl.constexpr,
):  # fmt: skip
    """E: experts of a rank."""
    plan = tl.program_id(0)
    level = plan % LEVELS
    r = tl.arange(0, R_POW2)
    x = tl.arange(0, E_POW2)
    s = tl.arange(0, S_POW2)
    live = (r < R)[:, None] & (x < E)[None, :]
    left = tl.load(counts + r[:, None] * E + x[None, :], mask=live, other=0)
    load = tl.sum(left, 1)
    mean = tl.sum(load // R, 0) + (tl.sum(load % R, 0) + R - 1) // R
    most = tl.max(load, 0)
    part = (level * level * level).to(tl.float32) * ((LEVELS - 1) ** -3)
    target = min(mean + tl.ceil((most - mean).to(tl.float32) * part).to(tl.int32), most)
    rank_key = (r ^ LAST).to(tl.int64) << FREE
    free = tl.where(r < R, S, 0)
    held = tl.full((R_POW2, S_POW2), -1, tl.int32)
    taken = tl.zeros((R_POW2, S_POW2), tl.int32)
    found = True
    while found:
        own = tl.max(left, 1)
        excess = load - target
        gives = (own > LEAST) & (excess > LEAST)
        key = tl.max(tl.where(gives, (excess.to(tl.int64) << LOW) | rank_key, -1), 0)
        found = key >= 0
        sender = ((key >> FREE) & LAST).to(tl.int32) ^ LAST
        above = (key >> LOW).to(tl.int32)
        enough = (left >= above) & (plan >= LEVELS)
        wish = tl.where(enough, ENOUGH | (left ^ MOST).to(tl.int64), left.to(tl.int64))
        wish = (wish << LOW) | (x ^ (E_POW2 - 1))[None, :]
        of_sender = tl.max(tl.max(tl.where((r == sender)[:, None], wish, -1), 1), 0)
        have = ((of_sender >> LOW) & MOST).to(tl.int32)
        have = tl.where(of_sender >> LOW >= ENOUGH, have ^ MOST, have)
        local = (of_sender & (E_POW2 - 1)).to(tl.int32) ^ (E_POW2 - 1)
        give = min(above, have)
        wanted = sender * E + local
        holds = tl.max((held == wanted).to(tl.int32), 1)
        is_open = (free > 0) & (r != sender) & (holds == 0) & found
        room = target - load
        complete = is_open & (room > LEAST) & (room <= give)
        fill = is_open & (room > give)
        begin = fill & (free > 1)
        rule = tl.where(complete, 3, tl.where(begin, 2, tl.where(fill, 1, 0)))
        value = tl.where(rule == 1, room ^ MOST, room).to(tl.int64)
        keys = (rule.to(tl.int64) << RULE) | (value << LOW) | rank_key | free
        best = tl.max(tl.where(rule > 0, keys, -1), 0)
        found = found & (best >= 0)
        receiver = ((best >> FREE) & LAST).to(tl.int32) ^ LAST
        rule_of = (best >> RULE).to(tl.int32)
        value_of = ((best >> LOW) & MOST).to(tl.int32)
        slots = max((best & 63).to(tl.int32), 1)
        begun = max(give, (value_of + slots - 1) // slots)
        moved = tl.where(rule_of == 3, value_of, tl.where(rule_of == 2, begun, value_of ^ MOST))
        moved = min(moved, have)
        moved = tl.where(found, moved, 0)
        to = (r == receiver) & found
        at = to[:, None] & (s[None, :] == (S - free)[:, None])
        held = tl.where(at, wanted, held)
        taken = tl.where(at, moved, taken)
        free -= to.to(tl.int32)
        load += tl.where(to, moved, 0) - tl.where(r == sender, moved, 0)
        left -= tl.where((r == sender)[:, None] & (x == local)[None, :], moved, 0)
    slots_at = (plan * R + r)[:, None] * S + s[None, :]
    exists = (r < R)[:, None] & (s < S)[None, :]
    tl.store(expert + slots_at, held, mask=exists)
    tl.store(rows + slots_at, taken, mask=exists)
    tl.store(load_out + plan * R + r, load, mask=r < R)


def plan(counts, *, num_spare, least_rows, levels):
    """int32[R, e] -> expert and rows [L, R, S], load [L, R]."""
    (R, E), S, L = counts.shape, num_spare, 2 * levels
    slots = jax.ShapeDtypeStruct((L, R, S), jnp.int32)
    R_POW2, E_POW2, S_POW2 = map(triton.next_power_of_2, (R, E, S))
    return launcher.triton_call(
        counts,
        kernel=_plan_kernel,
        out_type=(slots, slots, jax.ShapeDtypeStruct((L, R), jnp.int32)),
        grid=(L,),
        num_warps=max(1, min(R_POW2 * max(E_POW2, S_POW2) // 256, 8)),
        R=R, E=E, S=S, LEVELS=levels, LEAST=least_rows,
        R_POW2=R_POW2, E_POW2=E_POW2, S_POW2=S_POW2,
    )  # fmt: skip
