"""The connectors of engines, under the names that their configurations use.

Each module here is one of `prefixd.client.connectors`, and the same object.
"""
