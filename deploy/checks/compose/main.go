// Loads Compose files as docker compose does, with all profiles, and fails on what a schema cannot see: services,
// volumes and dependencies that are named and not defined, files that are mounted and not there.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

func check(path string) error {
	options, err := cli.NewProjectOptions([]string{path}, cli.WithProfiles([]string{"*"}))
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	for name, service := range project.Services {
		for _, volume := range service.Volumes {
			if volume.Type != types.VolumeTypeBind {
				continue
			}
			if _, err := os.Stat(volume.Source); err != nil {
				return fmt.Errorf("service %s mounts a path that is not there: %w", name, err)
			}
		}
	}
	fmt.Printf("%s: %d services, %d volumes\n", path, len(project.Services), len(project.Volumes))
	return nil
}

func main() {
	for _, path := range os.Args[1:] {
		if err := check(path); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
			os.Exit(1)
		}
	}
}
