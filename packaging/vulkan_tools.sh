#!/bin/sh
# Unpacks what compiling llama.cpp's Vulkan backend needs from Debian 13's packages: headers, the loader to link with, and
# glslc, which runs on its own C library. Installs nothing and needs no root, only apt and Debian's keyring.
#
#     packaging/vulkan_tools.sh FOLDER && EDGELM_VULKAN_TOOLS=FOLDER make dist VULKAN=1
#
# Debian 12's headers are too old for this llama.cpp, and its glslc leaves out the shaders for tensor cores.
set -eu
[ $# -eq 1 ] || { echo "usage: vulkan_tools.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
folder=$(pwd)

# The mirror is the one that this machine has its own packages from.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' | grep -v security | head -n 1)
[ -n "$mirror" ] || { echo "vulkan_tools.sh: run this on Debian, after apt-get update" >&2; exit 1; }
mkdir -p apt/lists/partial apt/cache/archives/partial apt/empty
: > apt/status
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > apt/sources.list
cat > apt/apt.conf <<END
Dir::State::lists "$folder/apt/lists";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "$folder/apt/empty";
APT::Sandbox::User "";
END
export APT_CONFIG="$folder/apt/apt.conf"
apt-get --quiet update
(cd apt && apt-get --quiet download glslc libshaderc1 libvulkan-dev libvulkan1 spirv-headers libc6 libstdc++6 libgcc-s1)
for package in apt/*.deb; do dpkg -x "$package" .; done

libraries=$(dirname "$folder"/usr/lib/*/libshaderc.so.1)
loader=$(echo "$libraries"/ld-linux-*.so.*)
mkdir -p bin
printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' "$loader" "$libraries" "$folder/usr/bin/glslc" > bin/glslc
chmod +x bin/glslc
ln -sf "$libraries"/libvulkan.so.1.* libvulkan.so
bin/glslc --version >&2
