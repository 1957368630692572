"""Functions for code that migrates from Transformer Engine: maps of flags, probabilities of all experts, chunks of
rows.

The block calls none of it; ep's transport `ragged` uses the type `RaggedParams`.
"""
