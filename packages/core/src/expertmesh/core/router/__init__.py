"""From each token's logits to its experts and their weights, and what keeps the choice balanced."""
