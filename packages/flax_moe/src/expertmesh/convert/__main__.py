"""`python -m expertmesh.convert`."""

import sys

from expertmesh.convert.cli import main

sys.exit(main())
