"""The broken job of lab 17: a Slurm script, a training script, and the ranks that it joins."""
