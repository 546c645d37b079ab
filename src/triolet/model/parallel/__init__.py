"""One model computed by several processes: tensor parallelism."""
