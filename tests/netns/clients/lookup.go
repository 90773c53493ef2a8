// Looks a name up by Go's own resolver (GODEBUG=netdns=go) and connects at once to port 443 of what it was told.
//
//	lookup NAME
//
// What it prints is drawn in ../test_clients.py.
package main

import (
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

func milliseconds(since time.Time) float64 {
	return float64(time.Since(since).Microseconds()) / 1e3
}

func main() {
	begun := time.Now()
	addresses, err := net.LookupHost(os.Args[1])
	took := milliseconds(begun)
	if err != nil {
		fmt.Printf("failed %.1f %v\n", took, err)
		return
	}
	tried := map[bool]bool{}
	for _, address := range addresses {
		isV6 := strings.Contains(address, ":")
		if tried[isV6] {
			continue
		}
		tried[isV6] = true
		connecting, outcome := time.Now(), "connected"
		connection, err := net.DialTimeout("tcp", net.JoinHostPort(address, "443"), 3*time.Second)
		if err != nil {
			outcome = err.Error()
		} else {
			connection.Close()
		}
		fmt.Printf("connection %.1f %s %s\n", milliseconds(connecting), address, outcome)
	}
	fmt.Printf("addresses %.1f %s\n", took, strings.Join(addresses, " "))
}
