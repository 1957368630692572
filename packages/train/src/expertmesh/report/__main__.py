"""`python -m expertmesh.report RUN`."""

import sys

from expertmesh.report.cli import main

sys.exit(main())
