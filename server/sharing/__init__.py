"""What nodes share: an engine on other machines that keeps payloads under their keys for a while.

`store` is the contract, `record` what lies in the engine; `redis_store` (Valkey and Redis, single
or Cluster) and `object_store` (S3 and what speaks like it) are the engines.
"""
