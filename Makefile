# Everything a person or CI does with vz. "make" alone prints this list.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export CGO_ENABLED ?= 0

COMMANDS := vz vz-supervisor vz-guest vz-runtime-probe
FUZZTIME ?= 20s

.PHONY: help demo build test test-go test-race test-fuzz accept bench generate lint fmt clean deps-demo deps-test deps-bench

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: deps-demo build ## run examples/shop for real, step by step (installs what is missing; SKIP_DEPS=1 only checks)
	@scripts/demo.sh

build: ## build the commands into bin/
	@go build -trimpath -o bin/ $(addprefix ./cmd/,$(COMMANDS))

test: deps-test lint build test-go test-race test-fuzz ## everything from unit to end-to-end, as CI runs it
	@scripts/demo.sh

test-go:
	@go test -json -timeout 10m ./... | go run ./internal/testreport $(if $(CI),-no-skips)

# The rooms where several goroutines meet.
RACE := ./faults/... ./netstack/... ./dns/... ./ingress/... ./guest/... ./supervisor/...
test-race:
	@CGO_ENABLED=1 go test -race -short -json -timeout 10m $(RACE) | go run ./internal/testreport

# Every fuzz target for FUZZTIME.
test-fuzz:
	@scripts/fuzz.sh $(FUZZTIME)

accept: deps-test build ## timed values: serial, medians
	@go test -tags accept -run '^TestAccept' -p 1 -count 1 -v ./...

bench: deps-bench build ## side-by-side benchmarks; QUICK=1 for a short run
	@go test -run '^$$' -bench . -benchmem -benchtime $(if $(QUICK),0.2s,1s) ./netstack/... ./faults/...

generate: ## write generated code anew
	@go generate ./...

# What only Linux has a driver for is checked on Linux alone; the command line,
# the client and the definition are for every system.
PORTABLE := ./cmd/vz ./config/... ./supervisor/client/... ./supervisor/registry/...
lint: ## gofmt and vet, for macOS and Windows too where the code is for them
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo "run make fmt"; exit 1; }
	@go vet ./...
	@GOOS=darwin GOARCH=arm64 go vet $(PORTABLE)
	@GOOS=windows go vet $(PORTABLE)

fmt: ## format the code
	@gofmt -w $$(git ls-files '*.go')

clean: ## remove what was built
	@rm -rf bin bench/out

deps-demo deps-test deps-bench:
	@scripts/deps.sh $(@:deps-%=%)
