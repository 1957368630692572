"""`python -m expertmesh.flax_moe.train`."""

import sys

from expertmesh.flax_moe.train.cli import main

sys.exit(main())
