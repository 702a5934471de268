"""Bodies in processes of their own: `isolation="process"`, and jobs that have killed workers before."""
