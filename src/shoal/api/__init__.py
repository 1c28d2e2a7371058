"""What `import shoal` offers: runs, plans and simulations as functions that return values. The command line calls the same code beneath."""
