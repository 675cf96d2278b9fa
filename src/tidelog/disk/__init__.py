"""The seam to the operating system: the only place that touches files, locks and directories."""
