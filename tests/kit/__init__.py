"""The shared test kit: harnesses that tests of several folders use.

`waiting` polls for a condition and runs calls at the same time. Start there: it is the only module in which a test may
sleep to wait for something. `s3` runs a real S3-compatible server. Harnesses of one folder stay in that folder.
"""
