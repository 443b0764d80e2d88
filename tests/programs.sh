#!/bin/sh
# Unpack the programs that the tests need, and that this machine lacks, into .programs/. Nothing is installed: no service
# starts, no user is added, and without the folder the machine is as it was. `tests/conftest.py` puts .programs/bin on PATH.
#
# This needs Debian's apt-get and dpkg, but not root. Without them, the tests of a missing program are skipped.
set -eu
cd "$(dirname "$0")/.."
FOLDER="$PWD/.programs"

programs() { # each with the package that has it
    printf '%s\n' prometheus:prometheus promtool:prometheus prometheus-alertmanager:prometheus-alertmanager \
        amtool:prometheus-alertmanager victoria-metrics:victoria-metrics vmalert:victoria-metrics mpirun:openmpi-bin \
        valgrind:valgrind callgrind_control:valgrind nm:binutils
    # The tests drive the browser with a package of npm's.
    if command -v npm >/dev/null; then echo chromium:chromium; fi
}

missing_packages() {
    programs | while IFS=: read -r program package; do
        command -v "$program" >/dev/null || [ -x "$FOLDER/bin/$program" ] || echo "$package"
    done | sort -u
}

# apt-get with its own lists and cache: it leaves those of the machine alone, and needs no root.
apt() { # program of apt, arguments
    program=$1
    shift
    "$program" -qq -o Debug::NoLocking=true -o Dir::State::Lists="$FOLDER/apt/lists" -o Dir::Cache="$FOLDER/apt" \
        -o Dir::State::extended_states="$FOLDER/apt/extended_states" -o APT::Sandbox::User="$(id -un)" "$@"
}

available() { # packages
    for package in "$@"; do
        if apt apt-cache show "$package" >/dev/null 2>&1; then
            echo "$package"
        else
            echo "The package $package is not available here, so its tests will be skipped." >&2
        fi
    done
}

download() { # packages
    mkdir -p "$FOLDER/apt/lists/partial" "$FOLDER/apt/archives/partial"
    apt apt-get update || return
    packages=$(available "$@")
    if [ -n "$packages" ]; then
        apt apt-get install --yes --download-only --no-install-recommends $packages >/dev/null || return
    fi
    for archive in "$FOLDER"/apt/archives/*.deb; do
        [ ! -e "$archive" ] || dpkg-deb --extract "$archive" "$FOLDER"
    done
    rm -rf "$FOLDER/apt"
}

write_start() { # program, its path below .programs, what to set first
    [ -x "$FOLDER/$2" ] || return 0
    cat >"$FOLDER/bin/$1" <<END
#!/bin/sh
# Start an unpacked program with the libraries and the data that were unpacked with it.
root=\$(cd "\$(dirname "\$0")/.." && pwd)
export LD_LIBRARY_PATH="\$root/$LIBRARIES:\$root/${LIBRARIES#usr/}\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
${3:-}
exec "\$root/$2" "\$@"
END
    chmod +x "$FOLDER/bin/$1"
}

# A program that finds its data by this path alone gets another path of the same length: a descriptor that its start opens.
write_start_with_data() { # program, path of its data below .programs
    [ -x "$FOLDER/usr/bin/$1" ] || return 0
    path=/proc/self/fd/9
    while [ ${#path} -le ${#2} ]; do path=$path/; done
    LC_ALL=C sed -i "s|/$2|$path|" "$FOLDER/usr/bin/$1"
    write_start "$1" "usr/bin/$1" "exec 9<\"\$root/$2\""
}

# What does not start is missing: a library may lie where this machine does not look for it.
drop_broken() { # program
    [ -x "$FOLDER/bin/$1" ] || return 0
    "$FOLDER/bin/$1" --version >/dev/null 2>&1 && return 0
    echo "$1 does not start from .programs, so its tests will be skipped." >&2
    rm "$FOLDER/bin/$1"
}

write_starts() {
    LIBRARIES=usr/lib/$(cd "$FOLDER/usr/lib" && printf '%s\n' *-linux-gnu* | head -n 1)
    mkdir -p "$FOLDER/bin"
    write_start_with_data prometheus-alertmanager usr/share/prometheus/alertmanager
    write_start_with_data prometheus usr/share/prometheus/web
    for program in promtool amtool victoria-metrics vmalert callgrind_control nm; do
        write_start "$program" "usr/bin/$program"
    done
    # Open MPI looks for ssh, though it starts nothing on other machines.
    write_start mpirun usr/bin/orterun 'export OPAL_PREFIX="$root/usr" PATH="$PATH:$root/usr/bin" PMIX_MCA_pcompress_base_silence_warning=1'
    write_start valgrind usr/bin/valgrind.bin 'export VALGRIND_LIB="$root/usr/libexec/valgrind"'
    # PulseAudio's library finds its own one by an absolute path.
    write_start chromium usr/lib/chromium/chromium \
        "export FONTCONFIG_FILE=\"\$root/fonts.conf\" LD_LIBRARY_PATH=\"\$LD_LIBRARY_PATH:\$root/$LIBRARIES/pulseaudio\""
    drop_broken chromium
    cat >"$FOLDER/fonts.conf" <<END
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir>$FOLDER/usr/share/fonts</dir>
  <cachedir>$FOLDER/fonts.cache</cachedir>
</fontconfig>
END
}

# One run at a time: the next one then finds everything unpacked.
mkdir -p "$FOLDER"
[ "${1:-}" = locked ] || exec flock --close "$FOLDER" "$0" locked
missing=$(missing_packages)
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "The tests of these programs will be skipped, as this system has no apt-get:" $missing >&2
    exit 0
fi
echo "Unpacking into .programs/, without installing anything:" $missing
if ! download $missing; then
    echo "They could not be downloaded, so their tests will be skipped." >&2
elif [ -d "$FOLDER/usr/lib" ]; then
    write_starts
fi
