"""What `python -m sparsejax.demo` runs."""

import sys

from sparsejax.demo import main


sys.exit(main())
