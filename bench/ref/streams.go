package main

import (
	"bufio"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// streams reads clients streams at once, their starts spread over one chunk interval, so that chunks come evenly
// and not in bursts. A missing, repeated or reordered chunk, or an end without [DONE], is a failure.
func streams(target string, clients int) error {
	u, err := url.Parse(target)
	if err != nil {
		return err
	}
	chunks, _ := strconv.Atoi(u.Query().Get("n"))
	every, _ := strconv.Atoi(u.Query().Get("us"))
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: clients}
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	tallies := make([]tally, clients)
	var group sync.WaitGroup
	begin := time.Now()
	for i := range tallies {
		group.Add(1)
		go func() {
			defer group.Done()
			time.Sleep(time.Duration(i*every/clients) * time.Microsecond)
			if err := stream(client, target, chunks, &tallies[i]); err != nil {
				tallies[i].fail(err)
			}
		}()
	}
	group.Wait()
	return report("chunks", time.Since(begin).Seconds(), tallies)
}

// stream notes for each chunk how long it was on its way: from the engine's clock in it to now, on one machine.
func stream(client *http.Client, target string, chunks int, mine *tally) error {
	response, err := client.Post(target, "application/json",
		strings.NewReader(`{"model":"bench","stream":true,"messages":[{"role":"user","content":"Count."}]}`))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	mine.delays = make([]int64, 0, chunks)
	done := false
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		line := lines.Text()
		now := time.Now().UnixNano()
		if _, rest, ok := strings.Cut(line, `"n":`); ok {
			number, rest, _ := strings.Cut(rest, `,"ns":`)
			sent, _, _ := strings.Cut(rest, ",")
			ns, err := strconv.ParseInt(sent, 10, 64)
			if err != nil || number != strconv.Itoa(len(mine.delays)) {
				return fmt.Errorf("chunk %d came as %.200s", len(mine.delays), line)
			}
			mine.delays = append(mine.delays, now-ns)
		} else if line == "data: [DONE]" {
			done = true
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !done || len(mine.delays) != chunks {
		return fmt.Errorf("a stream ended after %d of %d chunks", len(mine.delays), chunks)
	}
	return nil
}
