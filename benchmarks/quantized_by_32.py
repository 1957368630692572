"""Grouped GEMMs of 8-bit operands with scales of blocks of 32, as `quantized_grouped_gemm` times those of 128."""

from benchmarks import quantized_grouped_gemm


def main():
    quantized_grouped_gemm.main("mxfp8")


if __name__ == "__main__":
    main()
