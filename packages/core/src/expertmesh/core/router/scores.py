"""Score functions of a router, their slopes, and scores normalised over all experts.

    sigmoid      s = 1 / (1 + e^-x)              s' = s (1 - s)
    sqrtsoftplus s = sqrt(log(1 + e^x))          s' = sigmoid(x) / (2 s)
    normalised   q_e = s_e / (sum_j s_j + 1e-20);  softmax normalises itself

Dimension key: `...` tokens, E experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

__all__ = ["SCORE_FUNCTIONS"]

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
EPSILON = 1e-20  # keeps a sum of scores that are all 0 a divisor


def check_score_function(function: str, value: object) -> None:
    """Refuses what is not one of SCORE_FUNCTIONS.

    Raises:
      ValueError: naming the choices.
    """
    if value not in SCORE_FUNCTIONS:
        raise ValueError(
            f"{function}: score_function must be one of {', '.join(SCORE_FUNCTIONS)}; "
            f"got score_function={value!r}; choose one of these"
        )


def pointwise_scores(x: jax.Array, score_function: str) -> jax.Array:
    """s of float32 x: sigmoid or sqrtsoftplus."""
    if score_function == "sigmoid":
        return jax.nn.sigmoid(x)
    # Beyond 20 the other forms are equal in float32, and neither overflow nor underflow.
    middle = jnp.sqrt(jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))
    s = jnp.where(x < -20, jnp.exp(x / 2), middle)
    return jnp.where(x > 20, jnp.sqrt(jnp.maximum(x, 20.0)), s)


def pointwise_slopes(x: jax.Array, score_function: str) -> jax.Array:
    """s' of float32 x."""
    s = pointwise_scores(x, score_function)
    if score_function == "sigmoid":
        return s * jax.nn.sigmoid(-x)
    slope = jnp.where(x > 20, 1.0, jax.nn.sigmoid(x)) / (2 * jnp.where(x < -20, 1.0, s))
    return jnp.where(x < -20, s / 2, slope)


@dataclasses.dataclass(frozen=True)
class ExpertScores:
    """q of a token, also where one expert is chosen. A value, so that it can be an op's option."""

    score_function: str

    def __call__(self, logits: jax.Array) -> jax.Array:
        """float32[..., E]."""
        x = logits.astype(jnp.float32)
        if self.score_function == "softmax":
            return jax.nn.softmax(x)
        s = pointwise_scores(x, self.score_function)
        return s / (jnp.sum(s, axis=-1, keepdims=True) + EPSILON)

    def grad(self, logits: jax.Array, d_scores: jax.Array) -> jax.Array:
        """The cotangent of the logits for that of q, which may lack the dimensions of tokens."""
        x = logits.astype(jnp.float32)
        q = self(x)
        centred = d_scores - jnp.sum(d_scores * q, axis=-1, keepdims=True)
        if self.score_function == "softmax":
            return q * centred
        total = jnp.sum(pointwise_scores(x, self.score_function), axis=-1, keepdims=True) + EPSILON
        return centred * (pointwise_slopes(x, self.score_function) / total)
