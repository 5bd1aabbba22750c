from paged_jax.cli import main

if __name__ == "__main__":
    main()
