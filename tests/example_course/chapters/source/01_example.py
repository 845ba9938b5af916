# %% [markdown]
# # A slot that waits
#
# {{badges}}
#
# Three people ask at the same moment.

# %% tags=["hide-input"]
# {{colab}}

# %% tags=["parameters"]
device, seed, size = "cpu", 0, 3

# %% [markdown]
# ## What the picture shows

# %%
import sys

print("a progress bar", file=sys.stderr)
sum(range(size))

# %%
from ipywidgets import HTML

HTML("<b>live</b>")

# %%
from cbserve.course import claim, ledger

claim("static-40.7", utilisation=(10 + 100 + 500) / (3 * 500))

# %%
ledger()
