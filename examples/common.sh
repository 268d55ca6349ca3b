# What every example begins with: builds the host and the guests, and makes a throw-away data folder, so that trying an example leaves
# your models and data alone. Sourced with MODEL and OUT as arguments, not run. Sets model, out, host and guests.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac }
model=$(absolute "${1:?a Hugging Face folder or a .gguf file}") out=$(absolute "${2:?a folder for the results}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo build --quiet --release --package nodus-host
cargo xtask guests
host=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/release/nodus-host
guests=$PWD/tenants/target/wasm32-wasip2/release

NODUS_DATA_DIR=$(mktemp -d)
export NODUS_DATA_DIR
trap 'rm -rf "$NODUS_DATA_DIR"' EXIT
