"""`python -m utils.validation`: the whole table, and other tools on the same rows."""

from utils.validation.peers import compare_peers
from utils.validation.report import validate

if __name__ == "__main__":
    validate()
    print(f"\n{'memory of one GPU':<28}{'tool':<28}{'rows':>5}{'median':>8}{'bias':>8}")
    for row in compare_peers():
        print(f"{row.source:<28}{row.tool:<28}{row.rows:>5}{row.median:>8.1%}{row.bias:>8.1%}")
