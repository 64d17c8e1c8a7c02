"""Sharing between nodes: an engine on other machines keeps payloads under their keys for a while.

`engine_store` is the contract of engines, `engine_record` the format of their values;
`redis_store` (Valkey and Redis, single or Cluster) and `object_store` (S3 and compatible ones) are
the engines. `peers` keeps only in an engine which node has what, and `behind` puts a bucket behind
either.
"""
