"""Grouped GEMMs of 8-bit operands with a scale per group and expert, as `quantized_grouped_gemm` times those of 128."""

from benchmarks import quantized_grouped_gemm


def main():
    quantized_grouped_gemm.main("fp8_current")


if __name__ == "__main__":
    main()
