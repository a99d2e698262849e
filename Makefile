# Bulkhead: the same targets for a person and for CI. `make help` lists them.
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

export CARGO_TARGET_DIR ?= $(CURDIR)/target
T := $(CARGO_TARGET_DIR)

# The toolchain that `tools/setup.sh` chose; made anew when the machine has changed.
ifneq ($(filter-out help clean,$(or $(MAKECMDGOALS),help)),)
include $(T)/toolchain.mk
endif
$(T)/toolchain.mk: FORCE
	@tools/setup.sh $(T)

X86 := x86_64-unknown-none
ARM := aarch64-unknown-none-softfloat
KERNEL_ELF := $(T)/images/bulkhead-x86_64.elf
CHECKED_ELF := $(T)/images/bulkhead-x86_64-checked.elf
CELLCTL := $(T)/x86_64-unknown-linux-gnu/release/cellctl
MKIMAGE := $(T)/release/bulkhead-mkimage
GUESTS := $(T)/guests/root-initrd $(T)/guests/guest-initrd $(T)/guests/bare.elf

# How a node boots: pvh, grub-bios, grub-uefi; native is its Linux on the bare machine, to compare.
BOOT ?= pvh

# What a person may say on the command line goes to the starter as it was typed: not expanded by
# make, not seen by a shell.
NODE_OPTIONS := CMD SHARE OUT LIMIT CPUS MEM ICOUNT KERNEL INITRD BOOT CONFIG APPEND ROOT_APPEND NONCE
define pass
ifneq ($$(value $(1)),)
override $(1) := $$(value $(1))
export $(1)
else
unexport $(1)
endif
endef
$(foreach option,$(NODE_OPTIONS),$(eval $(call pass,$(option))))

# What a node needs: Linux alone boots without the hypervisor, and another Linux without ours.
NODE := tools $(if $(and $(KERNEL),$(INITRD)),,guests) $(if $(filter native,$(BOOT)),,hypervisor)

.PHONY: FORCE help setup build hypervisor checked tools guests lint test node run demo image doc clean
FORCE:

help: ## this list
	@echo 'make TARGET, one of:'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

setup: $(T)/toolchain.mk ## what the other targets need: looks, says, adds (instant if all is there)
	@:

build: hypervisor tools guests ## hypervisor, tools, and the Linux for the cells

hypervisor: tools
	@$(CARGO) build --quiet --release -p bulkhead --target $(X86) $(BARE)
	@mkdir -p $(T)/images
	@cp $(T)/$(X86)/release/bulkhead $(KERNEL_ELF)
	@$(MKIMAGE) symbols $(KERNEL_ELF) >$(T)/images/symbols.log

checked: tools
	@$(CARGO) build --quiet --profile checked -p bulkhead --target $(X86) $(BARE)
	@mkdir -p $(T)/images
	@cp $(T)/$(X86)/checked/bulkhead $(CHECKED_ELF)
	@$(MKIMAGE) symbols $(CHECKED_ELF) >$(T)/images/symbols-checked.log

tools:
	@$(CARGO) build --quiet --release -p bulkhead-mkimage -p bulkhead-tests

guests: $(GUESTS)

$(T)/guests/vmlinuz: guests/kernel.sh
	@guests/kernel.sh $(T)

$(T)/guests/bare.elf: FORCE
	@$(CARGO) build --quiet --release -p bulkhead-guests --target $(X86) $(BARE)
	@mkdir -p $(@D)
	@cp $(T)/$(X86)/release/bare $@

$(CELLCTL): FORCE
	@$(CARGO) rustc --quiet --release -p bulkhead-cellctl --target x86_64-unknown-linux-gnu -- \
	    -Ctarget-feature=+crt-static

$(T)/guests/guest-initrd: guests/pack.sh guests/guest-init.sh $(T)/guests/vmlinuz
	@guests/pack.sh $(T)/guests/linux guests/guest-init.sh $@ 'button evdev'

$(T)/guests/root-initrd: guests/pack.sh guests/root-init.sh $(wildcard guests/cells/*) $(CELLCTL) \
    $(T)/guests/guest-initrd $(T)/guests/vmlinuz
	@guests/pack.sh $(T)/guests/linux guests/root-init.sh $@ \
	    'button virtio_pci virtio_mmio virtio_blk virtio_net vmw_vsock_virtio_transport' \
	    $(CELLCTL)=bin/cellctl $(T)/guests/vmlinuz=cells/vmlinuz \
	    $(T)/guests/guest-initrd=cells/guest-initrd \
	    $(foreach file,$(wildcard guests/cells/*),$(file)=cells/$(notdir $(file)))

lint: ## rustfmt, clippy and rustdoc without warnings, for host and bare metal; shellcheck
	$(CARGO) fmt --check
	$(CARGO) clippy --quiet --workspace --exclude bulkhead --exclude bulkhead-guests --all-targets -- -D warnings
	$(CARGO) clippy --quiet -p bulkhead -p bulkhead-guests -p bulkhead-vmm -p bulkhead-abi --target $(X86) $(BARE) -- -D warnings
	$(CARGO) clippy --quiet -p bulkhead-vmm -p bulkhead-abi --target $(ARM) $(BARE) -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --no-deps --workspace --exclude bulkhead --exclude bulkhead-guests
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --no-deps -p bulkhead -p bulkhead-guests --target $(X86) $(BARE)
	shellcheck .ci/run $$(git ls-files '*.sh')

test: build checked ## all tests, on the host and in nodes
	@$(T)/release/suite

node: $(NODE) ## CMD='…' [SHARE=dir] [OUT=dir] [LIMIT=300] [CPUS=4] [MEM=2G] [ICOUNT=1] [KERNEL=… INITRD=…]
	@$(T)/release/node

run: $(NODE) ## a node with its console on this terminal (Ctrl-a x leaves)
	@$(T)/release/node --terminal

demo: build ## [NONCE=text]: the main job, without a keyboard
	@$(T)/release/demo

image: build ## bootable images under target/images
	@mkdir -p $(T)/images
	@$(MKIMAGE) bundle --config guests/node.toml --kernel $(T)/guests/vmlinuz \
	    --initrd $(T)/guests/root-initrd --output $(T)/images/bundle
	@$(MKIMAGE) iso --kernel-elf $(KERNEL_ELF) --bundle $(T)/images/bundle \
	    --output $(T)/images/bulkhead-x86_64.iso

doc: ## the crates' documentation, and the book where mdBook is installed
	$(CARGO) doc --quiet --no-deps --workspace --exclude bulkhead --exclude bulkhead-guests
	if command -v mdbook >/dev/null; then mdbook build docs; else echo 'doc: no mdBook here; its sources are in docs/'; fi

clean: ## removes all that was built
	rm -rf $(T) docs/book
