"""`python -m examples.demo`, from the root of a clone."""

import sys

from examples.demo.logs import main

sys.exit(main())
