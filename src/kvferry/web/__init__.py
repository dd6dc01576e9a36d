"""The live page: what a worker does now, for a browser on this host or one with a token.

Needs the extra ``serve``; imported only where a page is asked for.
"""
