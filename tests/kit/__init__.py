"""The shared test kit: harnesses that tests of several folders use.

`waiting` polls for a condition and runs calls at the same time. Start there: it is the only module in which a test may
sleep to wait for something. Harnesses of one folder stay in that folder.
"""
