"""Quantization: number formats and recipes, scales, QuantizedArrays, and the ops that make and undo them."""
