"""`python -m expertmesh.train`."""

import sys

from expertmesh.train.cli import main

sys.exit(main())
