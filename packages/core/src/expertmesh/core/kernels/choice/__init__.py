"""Which kernel runs, with which tiles: pure functions of sizes, types and the GPU, which is a value too."""
