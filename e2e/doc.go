// Package e2e holds the tests that go the whole way: they build the commands,
// bring Environments up on this machine's kernel, and look at them from the
// outside, as a user, a neighbour or the kernel does.
//
//	go test ./e2e                             everything; as root, 2 cores, 4 minutes
//	go test ./e2e -run TestCrashes -seed 7    the crashes of one seed again
//	VZ_CRASHES=10 go test ./e2e               fewer than its hundred crashes
//	VZ_RACE=1 go test ./e2e                   with the race detector in vz and vz-supervisor
//	go test -tags accept -run TestAccept ./e2e    measured values
//
// Every test has a world of its own (harness_test.go): a state root, a runtime
// directory and a git worktree in a directory with a name that occurs nowhere
// else. When the test ends its Environments are deleted, and whatever still
// bears that name fails the test: processes, namespaces, mounts, sockets,
// TAPs, cgroups and files (traces_test.go).
//
// What one package can show by itself is tested there and not again here.
package e2e
