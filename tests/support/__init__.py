"""What the tests stand on: ranks forked by a server with one thread, markers set by what a test
uses, and guards.
"""
