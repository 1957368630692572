"""What the block says of choices that did not fit, and of ids that are no experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from cases.covering import covering
from expertmesh.ep import EpConfig, raise_overflow, recv_capacity
from expertmesh.flax_moe import moe
from flax_moe.moe_oracle import EXPLICIT, make_config, make_data, make_mesh, place


def collapsed(config):
    """Data whose given choices all go to the experts 0 and 1."""
    params, x, _ = place(make_data(config, (8, 4, 16)), config, make_mesh((1, 2), EXPLICIT))
    idx = np.tile(np.int32([0, 1]), (8, 4, 1))
    return params, x, jax.device_put(idx, x.sharding)


@covering("num_chunks", [1, 2], covers=[2])
def test_overflow_is_raised_where_it_is_asked_for(num_chunks):
    """64 choices for rank 0, whose buffers hold the capacity of each part."""
    config = make_config(
        overflow="error", capacity_factor=1.0, num_chunks=num_chunks, use_bias=False
    )
    params, x, idx = collapsed(config)
    step = jax.jit(lambda params, x, idx: moe(params, x, config, topk_idx=idx))
    out = step(params, x, idx)
    capacity = recv_capacity(8, 2, 16 // num_chunks, 4, factor=1.0)
    demand = 64 // num_chunks
    assert out.overflow.demand.shape == (() if num_chunks == 1 else (2,))
    assert np.all(out.overflow.demand == demand) and out.overflow.capacity == capacity
    assert int(out.num_dropped) == 64 - num_chunks * capacity > 0
    words = f"demand={demand} rows, capacity={capacity}.*, {int(out.num_dropped)} choices dropped"
    with pytest.raises(RuntimeError, match=words):
        raise_overflow(out.overflow)
    raise_overflow(step(params, x, jnp.full_like(idx, -1)).overflow)


def test_accepted_drops_are_only_counted():
    config = make_config(capacity_factor=1.0, use_bias=False)
    params, x, idx = collapsed(config)
    out = jax.jit(lambda params, x, idx: moe(params, x, config, topk_idx=idx))(params, x, idx)
    assert out.overflow is None and int(out.num_dropped) > 0


def test_the_exchange_gets_both_options():
    config = make_config(overflow="error", debug=True, alignment=4)
    want = EpConfig(
        num_experts=8, capacity=64, alignment=4, axis="ep", overflow="error", debug=True
    )
    assert config.exchange(axis="ep", capacity=64) == want


@covering("remat", ["save_all", "recompute"], covers=["recompute"])
def test_given_ids_that_are_no_experts_are_found_by_checkify(remat):
    """Under the gradient and in parts, too; without `debug` such an id is not routed."""
    config = make_config(debug=True, use_bias=False, num_chunks=2, remat=remat)
    data = make_data(config, (2, 4, 16))

    def loss(params, idx):
        return jnp.sum(moe(params, data.x, config, topk_idx=idx).y)

    step = jax.jit(checkify.checkify(jax.grad(loss)))
    idx = jnp.zeros((2, 4, 2), jnp.int32).at[..., 1].set(1)
    error, gradients = step(data.params, idx)
    assert error.get() is None and np.any(gradients["wo"])
    assert "num_experts=8; got 9" in step(data.params, idx.at[1, 2, 0].set(9))[0].get()
