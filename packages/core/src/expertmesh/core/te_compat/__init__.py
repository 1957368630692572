"""What code that moves here from Transformer Engine calls: maps of flags, probabilities of all experts, chunks of rows.

The block calls none of it; ep's transport `ragged` uses the type `RaggedParams`.
"""
