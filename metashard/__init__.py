"""metashard: load diffusion model components straight into FSDP2 shards."""
