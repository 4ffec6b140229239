"""Python runs this when a process starts whose PYTHONPATH names this folder, so that all processes
of a test, whoever starts them, plant the same fault or note which lines they reach."""

import planting

planting.install()
