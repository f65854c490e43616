"""The commands of `mfs-trt`, one file each."""
