"""The block inside MaxText: its layers, parameters, router, losses and training loop, with the experts of this library.

    with expertmesh.maxtext.installed():  # or installed(recipe="fp8_block", num_chunks=2)
        state = train.train_loop(config, recorder)

MaxText keeps its constructor, so parameters have the names, shapes, shardings and initial values of its checkpoints,
scanned, prefused or plain. It keeps the gate and every router (`GateLogit`, `get_topk`), the balance loss, and the
update of the routing bias, or the counts for it under `gradient_accumulation_steps`. Dispatch, GEMMs, activation and
combine are those of `expertmesh.flax_moe.moe`, without drops.

Needs `maxtext` (tested: 0.2.5) and what its training loop imports.
"""

import warnings

try:
    import maxtext

    from expertmesh.maxtext.layers import RoutedAndSharedMoE, RoutedMoE, installed
    from expertmesh.maxtext.mesh import Layout, layout_of
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"expertmesh.maxtext: MaxText and what its layers import must be installed; got {error}; "
        "pip install maxtext==0.2.5, and the packages that `with` of the cell maxtext in ci/matrix.toml names",
        name=error.name,
    ) from error

_TESTED = "0.2.5"
if maxtext.__version__ != _TESTED:
    warnings.warn(
        f"expertmesh.maxtext: maxtext should be {_TESTED}, which is tested; got {maxtext.__version__}; an option "
        "that is new there would be ignored; run the CI cell maxtext with it",
        stacklevel=2,
    )

__all__ = ["Layout", "RoutedAndSharedMoE", "RoutedMoE", "installed", "layout_of"]
