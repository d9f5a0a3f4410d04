"""`python -m pykernels.cli`."""

import sys

from .main import main

sys.exit(main())
