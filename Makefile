# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` work on a bare Debian 12 with Rust, as root; `make help` lists the rest.

TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
ARCH := $(shell uname -m)
MUSL := $(ARCH)-unknown-linux-musl
STATIC := $(TARGET_DIR)/$(MUSL)/release/weft
STATIC_CNI := $(TARGET_DIR)/$(MUSL)/release/weft-cni
# The largest size of the plugin, in bytes. It is read from disk and started for every pod.
CNI_SIZE := 2097152
STEP := tools/step
FUZZ_SECONDS ?= 60
TEST_THREADS ?= $(shell expr 3 '*' $$(nproc))
LAB_ARGS ?=

# The C compilers for ring. It needs no musl libc, only a compiler for the right processor.
export CC_$(ARCH)_unknown_linux_musl ?= musl-gcc
export CC_aarch64_unknown_linux_gnu ?= aarch64-linux-gnu-gcc
export CARGO_TERM_PROGRESS_WHEN ?= never
export CARGO_NET_RETRY ?= 5

.PHONY: help demo lab test quick check fmt alone static aarch64 fuzz clean-lab prepare-demo prepare-test
.PHONY: bench bench-docs bench-micro bench-shape prepare-bench
.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: prepare-demo ## install what is missing, build, run a cluster of three nodes on this machine
	@$(STEP) 2400 "release build" cargo build --release --locked --bin weft
	@$(STEP) 600 "release build of the CNI plugin" cargo build --release --locked -p weft-cni --bin weft-cni
	$(TARGET_DIR)/release/weft lab $(LAB_ARGS)

lab: static ## run such a cluster with the static binary, without installing anything; LAB_ARGS="--backend host-gw --ipv6"
	$(STATIC) lab $(LAB_ARGS)

# The steps of test-beside run two at a time, because each leaves cores unused: a release build links on one core, and a test waits. Make
# starts them in this order, so that one of two builds is for release and the other one for tests: cargo lets only one build write into a
# directory. tools/step shows the output of a step when it ends. The steps after them use both cores, or measure.
# The packages come first, because nothing should install beside a build.
test: prepare-test ## install what is missing, then every check and test
	@tools/prepare kube
	@tools/prepare conformance
	@tools/prepare deb
	@$(MAKE) --no-print-directory -j1 fmt
	@STEPS_BESIDE=1 $(MAKE) --no-print-directory -j2 test-beside
	@STEPS_BESIDE=1 $(MAKE) --no-print-directory -j2 test-vm-loss test-aside
	@$(MAKE) --no-print-directory -j1 test-lab bench-shape $(if $(FLANNELD)$(FLANNEL_CNI),test-flannel,no-flannel) test-all

.PHONY: test-beside test-aside
test-beside: static prepare-kube prepare-conformance check static-bare aarch64 test-build test-vm test-kube fuzz image test-clusters test-conformance test-deb

# test-vm-loss uses one core and must not be slowed down. So these steps get only the time of the processors that nothing else wants.
test-aside:
	@STEP_FACTOR=$$((4 * $${STEP_FACTOR:-1})) chrt --idle 0 $(MAKE) --no-print-directory -j1 alone test-without-kube

# Integration tests that need no root, no network and little time.
QUICK := --lib --bins --test golden --test laws --test kinds --test codec_network --test codec_wire --test laws_hold --test laws_peers --test layers --test docs
quick: fmt ## formatting, clippy, unit, golden and law tests, in at most 90 s after a first build
	@$(STEP) 900 "clippy" cargo clippy --workspace --all-targets --locked -- -D warnings
	@LAST_STEP=1 $(STEP) 900 "unit, golden, laws" cargo test --workspace --locked --no-fail-fast $(QUICK)

fmt: ## check the formatting
	@$(STEP) 60 "formatting" cargo fmt --all --check

# Tests that a plain `cargo test` leaves out. Cargo chooses the features of dependencies for all packages that are named, so every build of
# tests names the whole workspace. With another choice, cargo would build many crates again.
OWN_STEP := --test kube --test kube_mesh --test kube_store --test api_server --test vm --test deploy_deb --test page

check: ## clippy; each warning is an error
	@$(STEP) 900 "clippy" cargo clippy --workspace --all-targets --locked -- -D warnings
	@$(STEP) 300 "clippy of the tests with a step of their own" cargo clippy --workspace $(OWN_STEP) --locked -- -D warnings

# A workspace build unifies features, and would hide a forbidden dependency of a pure crate.
alone: ## build each crate and each feature alone, so that no forbidden dependency hides
	@$(STEP) 300 "weft-backends alone" cargo check --locked -p weft-backends
	@$(STEP) 300 "weft-cni alone" cargo check --locked -p weft-cni
	@$(STEP) 300 "weft-doctor alone" cargo check --locked -p weft-doctor
	@$(STEP) 300 "weft-lab alone" cargo check --locked -p weft-lab
	@$(STEP) 300 "weft-udp alone" cargo check --locked -p weft-udp
	@$(STEP) 300 "weft-subnet without features" cargo check --locked -p weft-subnet --no-default-features
	@for feature in $$(sed -n '/^\[features\]/,/^$$/s/^\([a-z][a-z0-9-]*\) = .*/\1/p' subnet/Cargo.toml); do \
	  $(STEP) 300 "weft-subnet with $$feature alone" \
	    cargo check --locked -p weft-subnet --no-default-features --features $$feature || exit 1; \
	done
	@$(STEP) 300 "weft without Kubernetes" cargo clippy --locked -p weft --no-default-features --all-targets -- -D warnings

# Beside this, no step may build or start target/debug/weft: a build of the whole workspace puts the agent with Kubernetes there.
.PHONY: test-without-kube
test-without-kube: ## test the agent without Kubernetes
	@$(STEP) 600 "tests of weft without Kubernetes" \
	  cargo test --locked -p weft --no-default-features --lib --bins --test cli --test deploy

.PHONY: test-build
test-build: ## build all tests, and run none
	@$(STEP) 1200 "build of the tests" cargo test --workspace --locked --no-run
	@$(STEP) 600 "build of the tests with a step of their own" cargo test --workspace --locked --no-run $(OWN_STEP)

# Relative relocations take half a megabyte of a static binary, and the start reads all of them, so they count as resident memory. The packed form
# takes 7 kB. Debian's linker knows it for x86_64 only.
comma := ,
PACKED := $(if $(filter x86_64-%,$(MUSL)),-C link-arg=-Wl$(comma)-z$(comma)pack-relative-relocs)
# The binaries have the same bytes wherever the tree, cargo's files and the target directory are. Code that a build writes into the target
# directory is compiled from there, so its paths are in messages of panics. The last prefix that matches counts.
REMAPPED := --remap-path-prefix=$(CURDIR)=/weft --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo --remap-path-prefix=$(TARGET_DIR)=/target
static static-bare: export RUSTFLAGS := $(strip $(RUSTFLAGS) $(PACKED) $(REMAPPED))
static: ## build the static binaries that are released: agent and CNI plugin
	@$(STEP) 2400 "static build" cargo build --release --locked --target $(MUSL) --bin weft
	@$(STEP) 600 "static build of the CNI plugin" cargo build --release --locked --target $(MUSL) -p weft-cni --bin weft-cni
	@for file in $(STATIC) $(STATIC_CNI); do \
	  ldd $$file 2>&1 | grep -qE 'statically linked|not a dynamic' || { echo "$$file is not static" >&2; exit 1; }; \
	done
	@[ $$(stat -c %s $(STATIC_CNI)) -le $(CNI_SIZE) ] || { echo "$(STATIC_CNI) is larger than $(CNI_SIZE) bytes" >&2; exit 1; }
	@ls -l $(STATIC) $(STATIC_CNI)

BARE := $(TARGET_DIR)/bare/$(MUSL)/release/weft
# The largest size of the agent without Kubernetes, in bytes: 12 MiB (docs/bench/method.md).
BARE_SIZE := 12582912
.PHONY: static-bare
# Only the result has a directory of its own, because nearly all dependencies are those of the agent with Kubernetes.
static-bare: ## build the static agent without Kubernetes
	@$(STEP) 2400 "static build without Kubernetes" env CARGO_BUILD_BUILD_DIR=$(TARGET_DIR) \
	  cargo build --release --locked --no-default-features --target $(MUSL) --target-dir $(TARGET_DIR)/bare --bin weft
	@[ $$(stat -c %s $(BARE)) -le $(BARE_SIZE) ] || { echo "$(BARE) is larger than $(BARE_SIZE) bytes" >&2; exit 1; }
	@ls -l $(BARE)

VERSION := $(shell tools/version)
IMAGE := $(TARGET_DIR)/weft-image.tar
IMAGE_ROOT := $(TARGET_DIR)/image

# This needs no daemon and no base image: the image contains static binaries only.
.PHONY: image
image: static ## write the container image, as an archive for `docker load` and `ctr -n k8s.io image import`
	@tools/image-root $(IMAGE_ROOT) $(STATIC) $(STATIC_CNI)
	@tools/image $(IMAGE) weft:$(VERSION) $(IMAGE_ROOT) /weft
	@ls -l $(IMAGE)

MANUAL := $(TARGET_DIR)/manual
DEB := $(TARGET_DIR)/weft_$(VERSION)-1_$(shell dpkg --print-architecture 2>/dev/null).deb
.PHONY: manual deb prepare-deb test-deb
manual: ## write the manual pages and the completions of shells into target/manual
	@$(STEP) 900 "manual pages" cargo build --workspace --locked --example weft-manual
	@rm -rf $(MANUAL) && $(TARGET_DIR)/debug/examples/weft-manual $(MANUAL)

deb: static manual ## write a Debian package for this machine's processor
	@tools/deb $(DEB) $$(dpkg --print-architecture) $(STATIC) $(STATIC_CNI) $(MANUAL)
	@ls -l $(DEB)

prepare-deb:
	@tools/prepare deb

test-deb: prepare-deb manual ## install, upgrade and remove the Debian package in a Debian with systemd, and check it with lintian
	@$(STEP) 900 "build for the package" cargo build --workspace --locked --bin weft --bin weft-cni
	@$(STEP) 900 "Debian package" cargo test --workspace --locked --test deploy_deb

# tools/release says for which processors. RELEASE_ARGS="--out DIR --image NAME amd64 arm64"
RELEASE_ARGS ?=
.PHONY: release test-release
release: ## build everything that is published into target/release-VERSION: binaries, packages, images, SBOM, licences, sums
	@tools/prepare release
	@tools/release $(RELEASE_ARGS)

test-release: ## build the release twice, in two places, compare all bytes, and start the binaries of other processors; half an hour
	@tools/prepare release
	@tools/release-twice $(RELEASE_ARGS)

aarch64: ## check that everything compiles for aarch64
	@$(STEP) 900 "aarch64" cargo check --locked --workspace --target aarch64-unknown-linux-gnu

fuzz: ## feed random input to every codec and to the guard of udp, for FUZZ_SECONDS in all
	@$(STEP) $$(($(FUZZ_SECONDS) + 600)) "fuzz, $(FUZZ_SECONDS) s" \
	  env WEFT_FUZZ_SECONDS=$$(($(FUZZ_SECONDS) / 2)) cargo test --workspace --locked --test fuzz

.PHONY: bench-cni
bench-cni: static ## measure ADD and DEL of the CNI plugin; FLANNEL_CNI=/path/to/flannel measures flannel's, too
	@LAST_STEP=1 $(STEP) 600 "CNI plugin" env WEFT_CNI=$(STATIC_CNI) cargo bench --locked -p weft-cni --bench add

.PHONY: bench-pods
bench-pods: static ## compare routed pods with the bridge; needs iperf3; FLANNEL_CNI=/path/to/flannel adds flannel's bridge
	@LAST_STEP=1 $(STEP) 600 "pods" env WEFT_CNI=$(STATIC_CNI) cargo bench --locked -p weft-cni --bench pods

.PHONY: bench-udp
bench-udp: prepare-bench static bench-program ## the rows of `make bench` for udp alone, beside FLANNELD=/path/to/flanneld and vxlan
	$(TARGET_DIR)/release/weft-bench run --weft $(STATIC) --out $(TARGET_DIR)/bench-udp --backends udp $(BENCH_ARGS)

.PHONY: bench-wireguard
bench-wireguard: prepare-bench static vm-programs ## the rows of `make bench` for wireguard in a virtual machine, and the CPU of an idle node; FLANNELD=/path/to/flanneld adds flannel
	@LAST_STEP=1 $(STEP) 1800 "wireguard, peers" env WEFT_BIN=$(STATIC) FLANNELD=$(abspath $(FLANNELD)) \
	  cargo test --workspace --locked --test vm -- --ignored --exact bench::wireguard_with_many_peers_and_nothing_to_do --show-output

.PHONY: prepare-kube test-kube
prepare-kube: ## install what a Kubernetes cluster needs, and build Kubernetes if that was not done before
	@tools/prepare kube
	@$(STEP) 2400 "Kubernetes and etcd" tools/kube-binaries

test-kube: prepare-kube ## test the Kubernetes store, and agents that use it, with a real API server
	@$(STEP) 900 "Kubernetes store" cargo test --workspace --locked --test kube_store
	@$(STEP) 300 "simulated API server" cargo test --workspace --locked --test api_server
	@$(STEP) 1200 "agents over Node objects" cargo test --workspace --locked --test kube_mesh

.PHONY: prepare-ui test-ui
prepare-ui:
	@tools/prepare ui

test-ui: prepare-ui ## test the page of `weft ui` in a browser without a screen; not a part of `make test`, because it installs chromium
	@$(STEP) 900 "build of the test of the page" cargo test --workspace --locked --test page --no-run
	@$(STEP) 600 "page in a browser" cargo test --workspace --locked --test page

.PHONY: kube-test kube-demo test-clusters
kube-test: image test-clusters ## test what deploy/ ships in real clusters; FLANNELD=/path/to/flanneld adds the migration in both directions

test-clusters: prepare-kube image
	@$(STEP) 900 "build of the cluster tests" cargo test --workspace --locked --test kube --example kube-demo --no-run
	@$(STEP) $(if $(FLANNELD),1500,900) "real clusters" \
	  cargo test --workspace --locked --test kube -- --show-output $(if $(FLANNELD),--include-ignored)

CONFORMANCE_ARGS ?=
.PHONY: kube-conformance prepare-conformance test-conformance conformance-docs
prepare-conformance:
	@tools/prepare conformance
	@$(STEP) 2400 "Kubernetes' own tests" tools/kube-binaries e2e.test ginkgo agnhost regression-issue-74839 coredns

kube-conformance: prepare-kube prepare-conformance image ## run Kubernetes' own network tests in about two hours; CONFORMANCE_ARGS='--cluster "ipv4 vxlan"' runs one cluster
	@cargo run --locked --example kube-conformance -- --out $(TARGET_DIR)/conformance $(CONFORMANCE_ARGS)

# A part of these tests, in one cluster. It belongs to `make test`.
test-conformance: prepare-conformance image
	@$(STEP) 900 "build of the conformance tests" cargo build --workspace --locked --example kube-conformance
	@$(STEP) 600 "Kubernetes' own network tests, a part" \
	  $(TARGET_DIR)/debug/examples/kube-conformance --tests short --cluster "ipv4 vxlan" --out $(TARGET_DIR)/conformance

conformance-docs: ## write docs/conformance.md from the last `make kube-conformance`
	@cargo run --quiet --locked --example kube-conformance -- --out $(TARGET_DIR)/conformance --page docs/conformance.md

kube-demo: prepare-kube image ## run a Kubernetes cluster of three nodes with weft on this machine, until Ctrl-C
	@cargo run --quiet --locked --example kube-demo

# These are the tests that are ignored without the two programs. Each filter is a part of all their names, and of no other name.
.PHONY: test-flannel no-flannel
test-flannel: needs-flannel prepare-test $(if $(FLANNELD),vm-programs) ## run the tests that need flannel's programs: FLANNELD=/path/to/flanneld, FLANNEL_CNI=/path/to/flannel, or both
	$(if $(FLANNELD),@$(STEP) 1200 "beside flanneld" \
	  env FLANNELD=$(abspath $(FLANNELD)) cargo test --workspace --locked --test mesh --test rules --test lab --test vm --example wg -- --ignored flanneld)
	$(if $(FLANNEL_CNI),@$(STEP) 600 "beside flannel's CNI plugin" \
	  env FLANNEL_CNI=$(abspath $(FLANNEL_CNI)) cargo test --workspace --locked --test plugin -- --ignored flannels_plugin)

.PHONY: needs-flannel
needs-flannel:
	@[ -n "$(FLANNELD)$(FLANNEL_CNI)" ] || { echo "test-flannel: set FLANNELD=/path/to/flanneld, FLANNEL_CNI=/path/to/flannel, or both" >&2; exit 1; }

no-flannel:
	@printf '\n==== skipped: no FLANNELD and no FLANNEL_CNI: the tests beside flannel count as ignored\n'

.PHONY: vm-programs vm-kernel test-vm test-vm-loss test-lab test-all
vm-programs:
	@$(STEP) 900 "programs of the virtual machines" cargo build --workspace --locked --example wg --example traffic

# It is downloaded once. The bench starts virtual machines where no mirror can be reached.
vm-kernel: vm-programs
	@$(STEP) 1200 "kernel of the virtual machines" \
	  cargo test --workspace --locked --test vm -- --ignored --exact bench::the_kernel_is_there

test-vm: static vm-programs ## run the agent on Debian's kernel, in virtual machines
	@$(STEP) 1800 "virtual machines" env WEFT_BIN=$(STATIC) cargo test --workspace --locked --test vm -- --skip loss::

# An emulated processor sends 100 packets per second only while nothing else runs.
test-vm-loss: static vm-programs ## count lost packets over restarts and changes of the backend, in virtual machines
	@$(STEP) 2400 "lost packets in virtual machines" env WEFT_BIN=$(STATIC) \
	  cargo test --workspace --locked --test vm -- loss:: --test-threads 1

test-lab:
	@$(STEP) 300 "weft lab" $(STATIC) lab

# Most of these tests wait most of the time, so more of them run at once than there are cores.
test-all:
	@LAST_STEP=1 $(STEP) 2400 "unit, golden, laws, kernel, mesh" \
	  env WEFT_BIN=$(STATIC) RUST_TEST_THREADS=$(TEST_THREADS) cargo test --workspace --locked --no-fail-fast

# SOAK names other steps: `make soak SOAK="test-vm test-clusters"`.
RUNS ?= 10
LOAD ?= 4
SOAK ?= test-all
.PHONY: soak
soak: prepare-test static test-build ## run `make test-all` RUNS=10 times in a row while LOAD=4 other processes keep the machine busy
	@tools/soak $(RUNS) $(LOAD) env STEP_FACTOR=4 $(MAKE) --no-print-directory -j1 $(SOAK)

.PHONY: bench-program
bench-program: prepare-bench
	@$(STEP) 2400 "build of the bench" cargo build --release --locked -p weft-bench

# This ends with an error if a promise is broken. A full run takes about 50 minutes, and with FLANNELD an hour and a half.
# BENCH_ARGS="--sizes 1000,5000 --rows cold,event" measures a part.
BENCH_ARGS ?=
bench: prepare-bench static static-bare bench-program vm-kernel ## measure speed and memory beside the kernel's floor and FLANNELD=/path/to/flanneld; BENCH_ARGS="--sizes 5000 --rows cold" measures a part
	$(TARGET_DIR)/release/weft-bench run --weft $(STATIC) --bare $(BARE) --out $(TARGET_DIR)/bench $(BENCH_ARGS)

.PHONY: bench-kube
bench-kube: prepare-bench prepare-kube static bench-program ## measure speed and memory with 5,000 Node objects of a real API server
	$(TARGET_DIR)/release/weft-bench kube --weft $(STATIC) --out $(TARGET_DIR)/bench \
	  --binaries "$${XDG_CACHE_HOME:-$$HOME/.cache}/weft/kube-$$(cat tools/kube-version)" $(BENCH_ARGS)

.PHONY: bench-storm
bench-storm: prepare-bench bench-program ## measure many nodes that start, renew, reboot and leave at once, and write docs/bench/storm.md; FLANNELD=/path/to/flanneld adds flannel
	$(TARGET_DIR)/release/weft-bench storm --out $(TARGET_DIR)/bench --page docs/bench/storm.md $(BENCH_ARGS)

bench-docs: ## write table and plots of the last `make bench` into docs/bench
	@cargo run --quiet --release --locked -p weft-bench -- docs --out $(TARGET_DIR)/bench --docs docs/bench

bench-micro: ## measure time and allocations of plan, diff and codecs
	@$(STEP) 1200 "micro-benches" cargo bench --locked -p weft-bench

# This uses the build of the tests: the bench judges shapes, so its own speed matters little.
bench-shape: ## check in at most two minutes that no cost grows too fast, and that storms cost no more requests than promised
	@$(STEP) 900 "build of the shape bench" cargo build --workspace --locked --bin weft-bench
	@$(STEP) 300 "shape of costs" $(TARGET_DIR)/debug/weft-bench shape --weft $(STATIC)
	@$(STEP) 300 "short storms" env -u FLANNELD $(TARGET_DIR)/debug/weft-bench storm --size 30 --idle 11 \
	  --out $(TARGET_DIR)/bench-storm --page $(TARGET_DIR)/bench-storm/storm.md

# All of it takes hours. MUTANTS_ARGS="--shard 1/8" tries an eighth, and MUTANTS="backends subnet" two of the three parts.
MUTANTS_ARGS ?=
MUTANTS ?= backends subnet agent
.PHONY: mutants mutants-diff
mutants: ## put faults into the code one by one, and list those that no quick test notices (docs/mutants.md)
	@tools/mutants "$(MUTANTS)" $(MUTANTS_ARGS)

mutants-diff: ## put faults into the lines that were changed since origin/main, or since the last tag
	@tools/mutants --diff "$(MUTANTS)" $(MUTANTS_ARGS)

# Not part of `make test`: the first run builds cargo-deny for some minutes. Run it when Cargo.lock changes.
.PHONY: deny
deny: ## check licences, sources and duplicates of the dependencies, and known vulnerabilities
	@tools/deny

# BARE_ARGS="demo" runs `make demo` alone; without arguments demo and test. Not part of `make test`: it takes an hour.
BARE_ARGS ?=
.PHONY: bare-check
bare-check: ## check in a fresh chroot that `make demo` and `make test` work on a bare Debian 12 with Rust
	@tools/bare-check $(BARE_ARGS)

clean-lab: ## remove files that killed or failed labs left behind
	@tools/clean-lab

prepare-demo: ## install what a build and the lab need
	@tools/prepare demo

prepare-bench: ## install what the bench and `weft lab --measure` need
	@tools/prepare bench

prepare-test: ## install what the tests need
	@tools/prepare test

SEED ?=
SECONDS ?= 60
FIRST ?= 1
.PHONY: sim
sim: ## simulate clusters with faults: SEED=n runs one seed and prints its timeline, SECONDS=n runs seeds for this time
	@$(STEP) 1800 "build of the simulator" cargo build --profile sim --locked -p weft-sim
	$(TARGET_DIR)/sim/weft-sim $(if $(SEED),seed $(SEED),for $(SECONDS) --first $(FIRST))
