// Command ref holds what the benchmark needs beside the gate itself, on Go's standard library alone:
//
//	ref engine  ADDR                      a fast fake engine
//	ref proxy   ADDR URL [pool]           the reference: the reverse proxy of Go's standard library
//	ref post    URL CONNS SECONDS [RATE]  small requests on kept connections, as fast as answered or at RATE/s in all
//	ref streams URL CLIENTS               concurrent streams from the fake engine, each chunk checked and timed
//	ref hold    URL CONNS                 CONNS idle connections after one request each, until stdin ends
//
// The load generators print one JSON object. They exit 1 when an answer was not exactly the engine's.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ref:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	arg := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	number := func(i int) int {
		n, _ := strconv.Atoi(arg(i))
		return max(n, 0)
	}
	switch arg(0) {
	case "engine":
		return engine(arg(1))
	case "proxy":
		return proxy(arg(1), arg(2), arg(3) == "pool")
	case "post":
		seconds, _ := strconv.ParseFloat(arg(3), 64)
		return post(arg(1), number(2), seconds, number(4))
	case "streams":
		return streams(arg(1), number(2))
	case "hold":
		return hold(arg(1), number(2))
	}
	return errors.New("usage: ref engine ADDR | proxy ADDR URL [pool] | post URL CONNS SECONDS [RATE] | streams URL CLIENTS | hold URL CONNS")
}

// tally is what one client of a load generator brings home.
type tally struct {
	delays []int64 // ns
	failed int
	why    error // the first failure
}

func (t *tally) fail(err error) {
	t.failed++
	if t.why == nil {
		t.why = err
	}
}

// report merges the tallies, prints them under the given name, and fails if any client did.
func report(what string, seconds float64, tallies []tally) error {
	var all tally
	for _, t := range tallies {
		all.delays = append(all.delays, t.delays...)
		all.failed += t.failed
		if all.why == nil {
			all.why = t.why
		}
	}
	sort.Slice(all.delays, func(i, j int) bool { return all.delays[i] < all.delays[j] })
	quantile := func(q float64) float64 {
		if len(all.delays) == 0 {
			return 0
		}
		return float64(all.delays[int(q*float64(len(all.delays)-1))]) / 1e3
	}
	out := map[string]any{
		what: len(all.delays), "failed": all.failed, "seconds": seconds, "per_s": float64(len(all.delays)) / seconds,
		"p50_us": quantile(.50), "p99_us": quantile(.99),
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		return err
	}
	if all.failed > 0 {
		return fmt.Errorf("%d failed, the first with: %w", all.failed, all.why)
	}
	return nil
}
