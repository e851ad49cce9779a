"""Trainers that metashard loads for. Each module here imports its library; import the one that you use."""
