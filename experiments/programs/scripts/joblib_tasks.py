"""Train in two workers of joblib's loky."""

from joblib import Parallel, delayed
from training import train

if __name__ == "__main__":
    for steps in Parallel(n_jobs=2)(delayed(train)(8) for _ in range(2)):
        print("true steps", steps)
