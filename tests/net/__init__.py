"""The mesh on a network of its own, with faults that only a kernel can make. `make net`, as root."""
