"""The main job: a byte-level decoder language model with MoE layers, trained on real text.

Run it with `python -m expertmesh.flax_moe.train`; `--help` lists the options. It needs the extra
`expertmesh-flax-moe[train]`.
"""
