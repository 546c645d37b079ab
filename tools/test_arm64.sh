#!/usr/bin/env bash
# Run tests as on 64-bit Arm, in an emulator, on an x86-64 Debian or Ubuntu: `tools/test_arm64.sh tests/kernels/test_cpu_*.py`.
# The arguments are pytest's. Needs the packages qemu-user and g++-aarch64-linux-gnu, the developers' environment in .venv, and, at
# the first run, package indexes: it puts a Python for Arm and the environment's packages into build/arm64 (2 GB). Tests take
# many times as long as on the machine itself.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=$PWD/build/arm64
readonly TORCH=torch==2.10.0 # the last whose wheel for Arm needs no CUDA
# An Armv8.2 of today; the emulator would show the processor that it runs on.
readonly FEATURES="fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm dcpop asimddp"

for tool in qemu-aarch64 aarch64-linux-gnu-g++; do
    command -v $tool > /dev/null || { echo "$tool is not installed (packages qemu-user and g++-aarch64-linux-gnu)"; exit 2; }
done

python() { qemu-aarch64 -cpu max -L "$FOLDER/root" "$FOLDER/root/usr/bin/python3.11" "$@"; }

install_python() {
    local apt=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$FOLDER/apt" -o "Dir::Cache=$FOLDER/apt"
        -o "Dir::State::status=$FOLDER/apt/status" -o APT::Sandbox::User=root)
    mkdir -p "$FOLDER"/{apt/lists/partial,debs,root/proc}
    touch "$FOLDER/apt/status"
    apt-get "${apt[@]}" update
    (
        cd "$FOLDER/debs"
        apt-get "${apt[@]}" download python3.11{,-minimal} libpython3.11-{minimal,stdlib} libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g \
            libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1
        for package in *.deb; do dpkg -x "$package" ../root; done
    )
    printf 'processor\t: 0\nFeatures\t: %s\nCPU implementer\t: 0x41\n\n' "$FEATURES" > "$FOLDER/root/proc/cpuinfo"
}

install_packages() {
    local wheels=(--quiet --target "$FOLDER/site" --no-deps --only-binary :all: --python-version 3.11 --implementation cp --abi cp311
        --abi abi3 --abi none)
    for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_17 manylinux2014; do
        wheels+=(--platform "${platform}_aarch64")
    done
    # Versions are those of the developers' environment, but torch's.
    local packages
    packages=$(.venv/bin/pip list --format freeze | grep -viE '^(torch|triton|triolet|nvidia)')
    # shellcheck disable=SC2086 # a word each
    PIP_CONSTRAINT=/dev/null .venv/bin/pip install "${wheels[@]}" $TORCH $packages
}

[[ -e $FOLDER/root/proc/cpuinfo ]] || install_python
[[ -e $FOLDER/.installed ]] || { install_packages && touch "$FOLDER/.installed"; }

export PYTHONPATH=$FOLDER/site:$PWD/src:$PWD PYTHONPYCACHEPREFIX=$FOLDER/pycache XDG_CACHE_HOME=$FOLDER/cache
export CXX=$(command -v aarch64-linux-gnu-g++) OMP_NUM_THREADS=1
python -m pytest -p no:cacheprovider "$@"
