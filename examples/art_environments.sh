#!/bin/sh
# Makes the environments of a trainer with ART and of this server, in FOLDER/art and FOLDER/server.
#
#   [EXTRA=cpu|cuda12|cuda13] [PYTHON=python3.12] sh examples/art_environments.sh FOLDER
#
# ART needs Python 3.12 to 3.14. EXTRA chooses MLX's build on Linux; a Mac needs none.
set -e
folder=${1:?"usage: art_environments.sh FOLDER"}
repository=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3.12}

"$python" -m venv "$folder/server"
"$folder/server/bin/python" -m pip install --quiet "$repository[${EXTRA:-cpu}]"

"$python" -m venv "$folder/art"
# The pins are complete, and include what this package needs of others to start and drive a server.
"$folder/art/bin/python" -m pip install --quiet --no-deps -r "$repository/requirements/trainers-art.txt"
"$folder/art/bin/python" -m pip install --quiet --no-deps "$repository"

echo "The trainer runs with $folder/art/bin/python."
echo "The server's interpreter is named by MLX_PARALLM_PYTHON=$folder/server/bin/python."
