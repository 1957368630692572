"""Choices that are not routed, or dropped: nothing of them reaches a value or a gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core import plan_permute, unpermute

IDX = jnp.array([[0, -1], [-1, -1], [1, 0], [1, 7]], jnp.int32)


def test_nan_of_a_token_does_not_reach_the_gradient_of_a_weight_without_a_row():
    """Token 1 has no rows at all, and its cotangent is NaN."""
    plan = plan_permute(IDX, num_experts=2)
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.normal(size=(plan.source.shape[0], 3)).astype(np.float32))
    g = jnp.asarray(rng.normal(size=(4, 3)).astype(np.float32)).at[1].set(jnp.nan)
    _, pull = jax.vjp(lambda w: unpermute(y, plan, w), jnp.ones((4, 2)))
    (gradient,) = pull(g)
    want = np.zeros((4, 2))
    for n, choice in enumerate(np.asarray(plan.source)):
        if choice >= 0:
            want[divmod(choice, 2)] = np.asarray(y[n], np.float64) @ np.asarray(g[choice // 2])
    np.testing.assert_allclose(gradient, want, rtol=1e-6)
