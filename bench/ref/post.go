package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

// wire is one kept connection that sends the same small chat request (a body of about 600 bytes) again and again.
// It talks to the socket directly: the load must not cost more than what it measures.
type wire struct {
	conn    net.Conn
	reader  *bufio.Reader
	request []byte
}

func dial(target string) (*wire, error) {
	u, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	body := `{"model":"bench","stream":false,"temperature":0.2,"max_tokens":64,"messages":[` +
		`{"role":"system","content":"You answer in one short sentence."},` +
		`{"role":"user","content":"` + strings.Repeat("Tell me about turnstiles. ", 17) + `"}]}`
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench\r\nAccept: */*\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", u.RequestURI(), u.Host, len(body), body)
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return nil, err
	}
	return &wire{conn, bufio.NewReader(conn), []byte(request)}, nil
}

// ask sends one request and checks that the answer is the engine's, byte for byte.
func (w *wire) ask() error {
	if err := w.conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if _, err := w.conn.Write(w.request); err != nil {
		return err
	}
	response, err := http.ReadResponse(w.reader, nil)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("status %d: %.200s", response.StatusCode, body)
	case string(body) != answer:
		return fmt.Errorf("a changed body: %.200s", body)
	}
	return nil
}

// post runs conns wires for the given time. Without a rate each asks again as soon as it is answered; with one
// they share it evenly, and a request that could not be sent in time counts from when it was due.
func post(target string, conns int, seconds float64, rate int) error {
	tallies := make([]tally, conns)
	var group sync.WaitGroup
	begin := time.Now()
	end := begin.Add(time.Duration(seconds * float64(time.Second)))
	for i := range tallies {
		group.Add(1)
		go func() {
			defer group.Done()
			mine := &tallies[i]
			w, err := dial(target)
			if err != nil {
				mine.fail(err)
				return
			}
			defer w.conn.Close()
			due := time.Now()
			var step time.Duration
			if rate > 0 {
				step = time.Duration(conns) * time.Second / time.Duration(rate)
				due = begin.Add(step * time.Duration(i) / time.Duration(conns))
			}
			for sent := time.Now(); sent.Before(end); due = due.Add(step) {
				if wait := time.Until(due); step > 0 && wait > 0 {
					time.Sleep(wait)
					sent = time.Now()
				} else if step > 0 {
					sent = due
				}
				if err := w.ask(); err != nil {
					mine.fail(err)
					return
				}
				now := time.Now()
				mine.delays = append(mine.delays, now.Sub(sent).Nanoseconds())
				sent = now
			}
		}()
	}
	group.Wait()
	return report("requests", time.Since(begin).Seconds(), tallies)
}

// hold opens conns connections, asks once on each, says so, and keeps them open until stdin ends.
func hold(target string, conns int) error {
	for range conns {
		w, err := dial(target)
		if err != nil {
			return err
		}
		defer w.conn.Close()
		if err := w.ask(); err != nil {
			return err
		}
		w.reader = nil
	}
	fmt.Printf("{\"held\":%d}\n", conns)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}
