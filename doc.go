// Package vz holds no code: vz is the commands below cmd, and the repository's
// rules are tests here.
package vz
